"""What several backends share, for plug-ins too: export, conversion, proof that a graph follows the model."""
