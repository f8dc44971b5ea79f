"""What the benchmarks are made of; the programs are beside this folder."""
