"""Modules with a forward of their own, trained as layers and by themselves: the same bits."""
