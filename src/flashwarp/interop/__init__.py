"""Other libraries' compilers and programs: a room each, and importing flashwarp imports none."""
