"""The same with kernels: launches, sums from the device, captured graphs."""
