"""Settings of what runs for long, from one TOML file, the environment and flags, checked before anything begins."""
