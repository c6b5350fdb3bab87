"""Parts of examples/policy_update.py: options, tasks, sampling, update (twice), compare, report."""
