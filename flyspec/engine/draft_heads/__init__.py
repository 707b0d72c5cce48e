"""Draft heads: small networks beside the target that draft from its hidden rows."""
