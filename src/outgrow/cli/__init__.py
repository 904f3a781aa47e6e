"""The command line: `outgrow train`, `outgrow plan`, `outgrow networks`. Nothing imports this package."""
