"""Read the folder of a float model: its files, what no layout reads, and what lies beside."""
