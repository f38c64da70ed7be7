"""Everything that talks to other ranks. Nothing else imports torch.distributed."""
