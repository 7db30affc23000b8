"""How the shipped checkpoint came about: its curriculum, its training and its evaluation. No part of the wheel."""
