"""Applications on arrays, for demo, benchmarks and examples."""
