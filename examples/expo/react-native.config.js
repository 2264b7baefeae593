// Expo's autolinking takes onnxruntime-react-native for a module of its own, since that ships a unimodule.json, and would
// link nothing of it on Android.
module.exports = { dependencies: { "onnxruntime-react-native": { platforms: { android: {}, ios: {} } } } };
