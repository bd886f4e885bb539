"""Small parts that several packages share; they import nothing of polymoe but its errors."""
