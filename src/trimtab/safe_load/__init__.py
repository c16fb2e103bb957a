"""Strict readers of archives, exported programs and TorchScript: none of them unpickles or runs what it reads.

A plug-in's backend loads its files with them.
"""
