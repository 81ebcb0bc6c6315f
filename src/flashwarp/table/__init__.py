"""Tables larger than memory: lookups of rows by id, converted, scaled and pooled by a kernel."""
