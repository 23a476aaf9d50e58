"""AscendJob YAML: what is wrong in it, and what a recovery strategy needs (`docs/facts/job_yaml.md`)."""
