import torch


def load_curve(hours, seed=0):
    """Hourly load with a daily and a weekly rhythm, standardised."""
    g = torch.Generator().manual_seed(seed)
    t = torch.arange(hours, dtype=torch.float32)
    load = torch.sin(t * 6.2832 / 24) + 0.5 * torch.sin(t * 6.2832 / 168) + 0.1 * torch.randn(hours, generator=g).cumsum(0) / 10
    return (load - load.mean()) / load.std()


def windows(curve, past, size):
    """A random batch of (past hours, the hour after them)."""
    start = torch.randint(len(curve) - past - 1, (size,))
    places = start[:, None] + torch.arange(past)
    return curve[places][..., None], curve[start + past]
