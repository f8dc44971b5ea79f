"""What the benchmark of the memory tier is made of; `memory_tier.py` beside it is the program."""
