"""What a training step does: its ops, values and saved tensors, recorded from a real or a fake step."""
