"""Spec x model -> Plan: resolve the names, prove that every hook fits. Nothing is changed."""

from __future__ import annotations

from hookrun.compiler.check import Findings, check
from hookrun.compiler.plan import Plan, PlannedHook, Target
from hookrun.compiler.resolve import resolve

__all__ = ["Findings", "Plan", "PlannedHook", "Target", "check", "resolve"]
