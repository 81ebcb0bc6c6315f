"""What a machine reaches without us, and how that is measured and reported.

Used by `flashwarp doctor` and `bench`, and by the demo and the benchmarks of the repository;
nothing that arrays need imports it.
"""
