"""The figures of docs/architecture/scale.md and specification.md, from the simulation."""
