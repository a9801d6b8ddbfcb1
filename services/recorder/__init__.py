"""The recorder: writes each run's answers to Parquet, its rounds and manifest to JSON."""
