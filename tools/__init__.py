"""Programs of the project that are no tests: benchmarks, the scale page, versions, releases."""
