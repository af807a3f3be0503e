"""Actor, critic and reference: how they load, compute, update and save."""
