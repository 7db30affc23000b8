"""What the operations share: page tables, backend selection, and the device functions of the meter."""
