"""Spec x model -> Plan: which modules and parameters each hook selects, frozen and printable. Nothing is changed."""
