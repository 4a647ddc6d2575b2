"""Measuring speculation against plain decoding: workloads, load generation, results, table."""
