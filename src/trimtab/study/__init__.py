"""Studies: search for recipes, store trials, confirm and select the winner."""
