"""One packed layer: :class:`~polymoe.layer.experts.FusedExperts`, what a call of it needs, and the check at load."""
