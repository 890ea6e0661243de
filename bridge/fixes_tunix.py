"""Corrections of Tunix 0.1.7."""

from bridge.engine_fixes import Fix

FIXES: tuple[Fix, ...] = ()
