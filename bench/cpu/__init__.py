"""What `make bench-cpu` measures: attention and writing of the compiled kernels beside the CPU's other ones."""
