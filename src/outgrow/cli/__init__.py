"""The command line: `outgrow train`, `plan`, `compare`, `networks`. The benchmarks alone import it."""
