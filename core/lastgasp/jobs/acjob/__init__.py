"""AscendJob YAML: what is wrong in it, and what a recovery strategy needs (`facts/job_yaml.md`)."""
