"""Finds plugins, resolves the ones that a run names, and calls lifecycle hooks.

Listing (:mod:`.discovery`) imports no implementation. Resolving (:mod:`.resolution`) imports the spec's module, and
:meth:`.resolution.ResolvedPlugin.load` the implementation.
"""
