"""The decorators of other libraries, made of this plugin's markers: a suite moves by changing one import."""
