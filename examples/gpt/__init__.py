"""The parts of the example `train_gpt.py`: model, data, cluster, faults, progress, phases and report."""
