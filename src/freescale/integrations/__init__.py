"""What the trainers of others import: `ddp` for any DDP trainer, `torchrec` for any TorchRec trainer, `zero_collision`
for both."""
