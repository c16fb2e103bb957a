"""Load forecasting for a power grid."""
