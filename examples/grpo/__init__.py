"""Parts of examples/policy_update.py, one job a file: tasks, sampling, update (twice), compare, report."""
