"""The bundled recipes, one YAML file each."""
