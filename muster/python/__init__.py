"""Functions and classes that `import muster` offers, one module for each thing that a person does."""
