"""Other libraries' compilers and programs: one file each, and importing flashwarp imports none."""
