"""For plugin authors: scaffold, checks, contract runs, replay."""
