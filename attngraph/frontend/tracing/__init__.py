"""The runs of torch.export, and what their errors say."""
