"""What a machine reaches without us, and how that is measured and reported.

Used by `flashwarp demo`, `doctor` and `bench`; nothing that arrays need imports it.
"""
