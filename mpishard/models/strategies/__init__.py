"""The strategies: what each of them shards, and little else."""
