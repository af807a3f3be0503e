"""What tests of plugins import: contract suites, the scripted engine, tiny models."""
