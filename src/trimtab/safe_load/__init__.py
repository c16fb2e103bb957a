"""Strict readers of torch archives, exported programs and TorchScript files. They never unpickle and never run file contents.

Backends of plug-ins should load their files with these readers.
"""
