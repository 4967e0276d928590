"""From an attention call to a kernel launch: argument structs, registry and planner."""
