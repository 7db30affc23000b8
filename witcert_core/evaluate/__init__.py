"""Evaluation: tasks, offline measurement, statistics and plots. Engines and plots are imported when they are used."""
