"""SGLang on this CPU: load, capacity, speed, accuracy and repairs."""
