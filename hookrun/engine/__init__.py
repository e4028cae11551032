"""A hook, from its mapping to its effect: spec, plan, proof, installation. Imports no other room of hookrun."""
