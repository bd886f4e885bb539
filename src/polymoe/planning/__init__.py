"""From a problem and a device to costs and plans. Pure Python."""
